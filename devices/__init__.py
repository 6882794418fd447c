"""Device files: what a device, its links and its hosts can do, as data; one file a device, and their reader."""
