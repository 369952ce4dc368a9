"""Experiments: one question a module, answered in tidy rows and figures."""
