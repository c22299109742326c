"""Who holds which page and slot, and what of it others may reuse."""
