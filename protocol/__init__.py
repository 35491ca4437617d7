"""What must be the same on every peer: messages, views, routes, work order, model, optimiser.

Pure logic: no socket, disk, clock, thread or process. Only `protocol.model`, `protocol.optimizer` and
`protocol.reference` import torch, so the rest loads in milliseconds.
"""
