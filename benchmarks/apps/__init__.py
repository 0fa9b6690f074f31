"""Applications that live on small collectives, over one interface to several backends."""
