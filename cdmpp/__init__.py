"""cdmpp: how long will this tensor program take on that device?"""
