"""Plans and runs as pages: one HTML file each that explains itself to a person, offline."""
