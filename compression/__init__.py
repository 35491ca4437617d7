"""What turns a stage's activations and gradients into bytes and back: bases, boundaries, codecs, token ids."""
