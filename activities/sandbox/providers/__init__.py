"""One file for each provider's SDK. A provider imports contracts, the port and its own SDK, and nothing else of Caisson."""
