"""Turn a dense model into a mixture of experts, and a mixture of experts into one with more experts."""
