"""Measuring: tidy results that resume, spread over seeds, timing and progress."""
