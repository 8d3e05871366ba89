"""HTML components: a policy writes them, a headless Chromium renders and checks them, simulated users edit
them (docs/product-html.md)."""
