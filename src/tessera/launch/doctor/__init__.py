"""`tessera doctor`: checks of this host and of a run for programs on several devices, with
fixes."""
