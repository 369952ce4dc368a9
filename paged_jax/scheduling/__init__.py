"""Scheduling as a pure function of counts: whom to admit, to run and to preempt."""
