"""What a laboratory proves of itself, and what p2pd reaches in it."""
