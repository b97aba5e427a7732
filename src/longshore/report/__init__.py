"""The plan as a page: one HTML file that explains a plan to a person, offline."""
