"""What the host offers: devices, addresses, libraries, files."""
