"""The one-time check of a kernel against the oracle, on the machine it is about to run on."""
