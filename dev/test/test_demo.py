"""The main job, as `make demo` runs it (dev/demo.sh, two to four minutes): the model learns the language of its stories."""
import re

from harness import *


@test
def the_demo_learns_its_stories():
    r = run(["dev/demo.sh"], env={"DATA": folder("data"), "OUT": folder("out")}, timeout=1400)
    loss, floor = map(float, re.search(r"validation loss ([0-9.]+), floor ([0-9.]+) nats/token", r.out).groups())
    check(floor > 0 and loss <= floor + 0.15, f"validation loss {loss} is more than 0.15 above the floor {floor}")
    good, total = map(int, re.search(r"(\d+) of (\d+) sentences parse", r.out).groups())
    check(total == 100 and good >= 90, f"{good} of {total} sampled sentences parse, not 90 of 100")
    # the same two by other roads: the manifest's floor, and the parser's own verdict by its exit code
    manifest = read(folder("data/manifest.json")).decode()
    check_near(floor, float(re.search(r'"floor_nats_per_token": ([0-9.]+)', manifest).group(1)), 1e-6, "floor")
    run(["python3", "prepro/stories.py", "--parse", folder("out/samples.txt"), "--drop-cut", "--min-share", "0.9"])
    run(["dev/demo.sh"], env={"DATA": folder("data"), "OUT": folder("out")}, code=1)  # nothing saved is overwritten


main()
