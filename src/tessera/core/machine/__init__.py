"""Machines and clusters: devices, hosts and links; as files, presets and values."""
