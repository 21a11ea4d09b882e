"""Programs that measure zcomm, run from a checkout and never installed."""
