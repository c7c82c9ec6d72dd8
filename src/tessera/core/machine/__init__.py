"""What is a machine, or a cluster: its devices, hosts and links; as files, presets and values."""
