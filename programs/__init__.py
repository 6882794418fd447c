"""Builds programs from recipes: recipe -> model -> graph -> shardings -> Program, shared by all commands."""
