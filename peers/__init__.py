"""What touches a socket, a disk, a clock, a thread or a process: transports, daemons, data, run folders, the CLI."""
