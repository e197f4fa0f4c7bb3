"""torchrun --nproc-per-node N tests/workers/pair_ranks.py CASES OUT: how `load_pairs` ends on each rank, as JSON."""

import json
import sys
from pathlib import Path

from utils.dist import all_gather, init_distributed
from utils.preferences import load_pairs
from utils.tiny import make_tokenizer

init_distributed()
endings = []
for files, overlong in json.loads(Path(sys.argv[1]).read_text()):
    try:
        data = load_pairs(files, "--train-files", make_tokenizer(), 20, 10, overlong)
        endings.append([data.uids, data.num_dropped, data.fingerprint()])
    except ValueError as error:
        endings.append(str(error))
gathered = all_gather(endings)
Path(sys.argv[2]).write_text(json.dumps(gathered))
