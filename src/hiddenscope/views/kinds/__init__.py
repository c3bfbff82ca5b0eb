"""One module for each kind of result: its views, its findings and its sections."""
