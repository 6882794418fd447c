"""Recurrent layers: the delta rule, the selective scan, and their states in a pool."""
