"""A laboratory for consumer links on one machine: namespaces, and a hub that gives each home its rate and delay."""
