"""The verb `plan`: devices, cost, report, pictures, search."""
