"""To be imported last where ranks are forked from, and nowhere else.

What is imported there by then is never looked at by the garbage collectors of ranks, which would copy the pages of half
a million objects since a collection writes to each. And the process ends with the tests, however these end.
"""

import gc

from mmtrain.launch.processes import end_with_parent

end_with_parent()
gc.collect()
gc.freeze()
