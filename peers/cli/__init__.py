"""The command `isthmus`. Modules here parse arguments and print; what they start lives elsewhere in `peers`."""
