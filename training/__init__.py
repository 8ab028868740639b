"""The torch mathematics of training: model, losses, advantages, packing, routing replay, weight transports.

It knows nothing of Ray, HTTP or the log, and is reached only from the actors. Nothing is re-exported: importing this
package must not import torch.
"""
