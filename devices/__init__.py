"""Device files, one per device: the rates, memory and links of a device and its host as data; and their reader."""
