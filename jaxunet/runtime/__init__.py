"""What every room stands on: errors, processes, devices, clocks, files."""
