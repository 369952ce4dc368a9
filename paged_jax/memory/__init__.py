"""Memory managers as pure functions on fixed-shape arrays, and the ledger that splits a pool."""
