"""stub"""
EPILOG=""
def command()->None:
    """x"""
