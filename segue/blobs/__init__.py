"""Bulk bytes of a run, stored under the sha256 of their content; events carry only the digest.

It never knows what the bytes mean and never deletes anything by itself.
"""

from segue.blobs.store import BlobStore

__all__ = ["BlobStore"]
