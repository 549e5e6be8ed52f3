"""The fault layer: what fails, is cut short, comes late or is lost below the real code. None is in the product."""
