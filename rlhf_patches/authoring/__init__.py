"""What somebody who writes a patch asks of upstream's code, and the plugin that is written for them."""
