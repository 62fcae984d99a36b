"""From a public call to a backend's function: validate, select, run."""
