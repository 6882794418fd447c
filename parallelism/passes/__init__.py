"""Passes: functions from a Program to a Program."""
