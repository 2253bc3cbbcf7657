"""Services that every other package uses: errors, processes, devices, timing, files."""
