"""The host's resources: devices, addresses, libraries, files."""
