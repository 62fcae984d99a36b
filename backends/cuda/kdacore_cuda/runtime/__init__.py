"""What forms use to launch: the driver, launches, parameters of a call's tensors, figures of devices."""
