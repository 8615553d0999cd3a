"""Models of transformers with all that is around them, as bundles for a page's pipelines."""
