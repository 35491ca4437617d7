"""A swarm of real processes on one machine, what is done to it, and what it must be equal to."""
