"""What joins GPUs, and how long a collective among them takes: links from datasheets (`catalogue.py`), which algorithm
and protocol NCCL picks (`choice.py`), the law of their times (`law.py`) with what was fitted of it (`fitted.py`), and
links as they were measured (`profile.py`, made by `fit.py`). `library.py` answers for either. numpy only.
"""
