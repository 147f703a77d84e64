"""The page at `/`: three files, no build step, nothing from elsewhere."""
