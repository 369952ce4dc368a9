"""Constants of the configuration classes, each with its source."""
