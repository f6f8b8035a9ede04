"""Tool calls in generated text, with one parser per format."""
