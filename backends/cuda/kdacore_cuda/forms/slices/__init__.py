"""The chunk ops on a slice of a row that continues on other ranks (``cp=``)."""
