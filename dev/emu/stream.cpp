// Streams, events and graphs. Work is a graph of operations: each names those it needs. With lazy streams nothing runs
// before somebody waits for it, the latest schedule CUDA allows: a missing wait then shows in the data. The vector
// clock of each operation tells the checker which operations are ordered, whatever order they happened to run in.
#include <string.h>
#include <deque>
#include <set>
#include "internal.h"
#define MAY_FAIL EMU_MAY_FAIL(cudaErrorUnknown)

namespace emu {

struct Graph;
struct Stream {
    uint32_t id, issued;
    bool blocking;               // waits for the null stream and the null stream for it
    OpRef last;
    std::deque<OpRef> queue;     // what has been issued and is not done
    Graph* capture;              // recording into this graph
    int last_node;               // in it
    std::vector<int> waited_nodes;
};
struct Event { OpRef op; Graph* graph; int node; bool timing; };
struct Node { std::string name; std::function<void()> run; void* pc; int lane; std::vector<int> needs; };
struct Graph { std::vector<Node> nodes; std::vector<Stream*> lanes; };
struct GraphExec { std::vector<Node> nodes; std::vector<Stream*> hidden; };

// A stream has room for about so much that is not done. Then CUDA lets the host stand still in the call until there is
// room again, which orders nothing that the checker would count on.
static const size_t MOST_QUEUED = 1024;

uint32_t host_time = 1;
__thread Op* running_op;
static std::recursive_mutex lock;
static std::deque<OpRef>& ops() { static auto* d = new std::deque<OpRef>; return *d; }   // by id - 1; for the checker
static std::vector<Stream*>& streams() {  // [0] is the null stream. Never destroyed: handles stay comparable
    static auto* v = new std::vector<Stream*>{new Stream{0, 0, true, nullptr, {}, nullptr, -1, {}}};
    return *v;
}
static std::set<Stream*>& live() { static auto* s = new std::set<Stream*>; return *s; }
static std::set<Event*>& live_events() { static auto* s = new std::set<Event*>; return *s; }
static std::vector<uint32_t>& host_clock() { static auto* v = new std::vector<uint32_t>; return *v; }
static cudaError_t last_error = cudaSuccess;
static int capturing;

cudaError_t set_error(cudaError_t e) {
    if (e != cudaSuccess) last_error = e;
    return e;
}

cudaError_t error_so_far() { return last_error; }

// A fault inside a kernel stays until the process ends.
static bool fatal_error() { return last_error == cudaErrorLaunchFailure || last_error == cudaErrorAssert; }

static Stream* find_stream(cudaStream_t s) {
    if (!s || s == cudaStreamLegacy || s == cudaStreamPerThread) return streams()[0];
    return live().count((Stream*)s) ? (Stream*)s : nullptr;
}

static Stream* new_stream(bool blocking) {
    auto* s = new Stream{(uint32_t)streams().size(), 0, blocking, nullptr, {}, nullptr, -1, {}};
    streams().push_back(s);
    return s;
}

// ---------------------------------------------------------------- what happened before what
static void join(std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    if (a.size() < b.size()) a.resize(b.size());
    for (size_t i = 0; i < b.size(); i++) if (b[i] > a[i]) a[i] = b[i];
}

static bool covers(const std::vector<uint32_t>& clock, const Op& op) {
    return clock.size() > op.stream->id && clock[op.stream->id] >= op.index;
}

const Op* op_by_id(uint32_t id) { return id && id <= ops().size() ? ops()[id - 1].get() : nullptr; }
bool op_before(uint32_t a, uint32_t b) {
    const Op *x = op_by_id(a), *y = op_by_id(b);
    return !x || !y || covers(y->clock, *x);
}
bool host_knows(uint32_t id) {
    const Op* x = op_by_id(id);
    return !x || covers(host_clock(), *x);
}

// ---------------------------------------------------------------- running operations
static void run_op(Op* op) {
    Op* outer = running_op;
    running_op = op;
    check_settle();
    if (op->run) op->run();
    running_op = outer;
    op->run = nullptr;
    op->ready = nullptr;
    op->needs.clear();
    op->done = true;
    op->finished = seconds();
}

// Runs what comes before op, then op; if not `patient`, only as far as nothing has to wait for other processes.
static void force(Op* op, bool patient = true) {       // by an own stack: queues may be long
    std::vector<Op*> path{op};
    while (!path.empty()) {
        Op* top = path.back();
        Op* missing = nullptr;
        for (auto& n : top->needs) if (!n->done) missing = n.get();
        if (top->done) {
            path.pop_back();
        } else if (missing) {
            path.push_back(missing);
        } else if (!patient && top->ready && !top->ready()) {
            return;
        } else {
            path.pop_back();
            run_op(top);
        }
    }
}

void wait_for(const OpRef& op) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!op) return;
    force(op.get());
    join(host_clock(), op->clock);
    host_time++;
}

static Op* waiting_before(const Op* op) {             // on its stream
    for (auto& n : op->needs) if (!n->done && n->stream == op->stream) return n.get();
    return nullptr;
}

// EMU_LAZY_STREAM=random:SEED: work goes on whenever some is issued, but of one stream only, now and then of another one.
static void go_on_at_random() {
    static uint64_t state = options().stream_seed * 0x9e3779b97f4a7c15u;
    static Stream* moving = streams()[0];
    state = state * 6364136223846793005u + 1442695040888963407u;
    if (state >> 60 == 0) moving = streams()[(state >> 33) % streams().size()];
    for (int i = 0; i < 2 && moving->last && !moving->last->done; i++) {
        Op* op = moving->last.get();
        while (Op* earlier = waiting_before(op)) op = earlier;
        force(op);
    }
}

static OpRef issue(Stream* s, const char* name, void* pc, std::function<void()> run, std::vector<OpRef> needs,
                   std::function<bool()> ready = nullptr) {
    auto op = std::make_shared<Op>();
    op->stream = s;
    op->index = ++s->issued;
    op->name = name;
    op->pc = pc;
    op->run = std::move(run);
    op->ready = std::move(ready);
    op->host_time = host_time++;
    op->done = op->skip_at_exit = false;
    if (s->last) needs.push_back(s->last);
    if (s->blocking) {  // the legacy null stream waits for all blocking streams and they for it
        if (s->id) needs.push_back(streams()[0]->last);
        else for (Stream* x : streams()) if (x != s && x->blocking) needs.push_back(x->last);
    }
    if (checking) {
        op->clock = host_clock();
        if (op->clock.size() <= s->id) op->clock.resize(s->id + 1);
        op->clock[s->id] = op->index;
        ops().push_back(op);
        op->id = (uint32_t)ops().size();
    }
    for (auto& n : needs) {
        if (!n) continue;
        if (checking) join(op->clock, n->clock);
        if (!n->done) op->needs.push_back(n);
    }
    s->last = op;
    s->queue.push_back(op);
    while (!s->queue.empty() && s->queue.front()->done) s->queue.pop_front();
    if (s->queue.size() > MOST_QUEUED && !running_op) force(s->queue.front().get());
    if (!options().lazy_streams) force(op.get());
    else if (options().stream_seed && !running_op) go_on_at_random();
    return op;
}

static OpRef capture_node(Stream* s, const char* name, void* pc, std::function<void()> run) {
    Graph* g = s->capture;
    Node n{name, std::move(run), pc, 0, s->waited_nodes};
    while (g->lanes[(size_t)n.lane] != s) n.lane++;
    if (s->last_node >= 0) n.needs.push_back(s->last_node);
    s->waited_nodes.clear();
    s->last_node = (int)g->nodes.size();
    g->nodes.push_back(std::move(n));
    auto op = std::make_shared<Op>();
    op->done = true;
    return op;
}

OpRef enqueue(cudaStream_t handle, const char* name, void* pc, std::function<void()> run, std::function<bool()> ready) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* s = find_stream(handle);
    if (!s) {
        report("bad stream", pc, nullptr, "%s on a stream that does not exist (destroyed?)", name);
        set_error(cudaErrorInvalidResourceHandle);
        return nullptr;
    }
    if (s->capture) return capture_node(s, name, pc, std::move(run));
    if (capturing && !s->id) {
        report("stream capture", pc, nullptr, "%s on the null stream while another stream is being captured", name);
        set_error(cudaErrorStreamCaptureImplicit);
        return nullptr;
    }
    return issue(s, name, pc, std::move(run), {}, std::move(ready));
}

// When the program ends kernels nobody waited for still run, so that their faults are found. Copies to pageable host
// memory do not: the memory may be gone.
void drain_for_exit() {
    std::lock_guard<std::recursive_mutex> guard(lock);
    for (size_t i = 0; i < streams().size(); i++) {
        std::vector<OpRef> chain{streams()[i]->last};
        std::set<Op*> seen;
        while (!chain.empty()) {
            OpRef op = chain.back();
            chain.pop_back();
            if (!op || op->done || !seen.insert(op.get()).second) continue;
            if (op->skip_at_exit) op->run = nullptr;
            for (auto& n : op->needs) chain.push_back(n);
        }
        if (streams()[i]->last) force(streams()[i]->last.get());
    }
}

cudaError_t synchronize(const char* call, void* pc) {
    if (capturing) {
        report("stream capture", pc, nullptr, "%s while a stream is being captured", call);
        return set_error(cudaErrorStreamCaptureUnsupported);
    }
    for (size_t i = 0; i < streams().size(); i++) wait_for(streams()[i]->last);
    return fatal_error() ? last_error : cudaSuccess;
}

static cudaError_t capture_forbids(Stream* s, const char* name, void* pc) {
    if (!s || !s->capture) return cudaSuccess;
    report("stream capture", pc, nullptr, "%s on a stream that is being captured", name);
    return set_error(cudaErrorStreamCaptureUnsupported);
}

}
using namespace emu;

extern "C" {
// ---------------------------------------------------------------- errors, device synchronisation
cudaError_t cudaGetLastError(void) {
    if (failing(__func__)) return cudaErrorUnknown;
    cudaError_t e = last_error;
    if (!fatal_error()) last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError(void) {
    if (failing(__func__)) return cudaErrorUnknown;
    return last_error;
}
cudaError_t cudaDeviceSynchronize(void) {
    MAY_FAIL;
    return synchronize("cudaDeviceSynchronize", PC);
}

// ---------------------------------------------------------------- streams
static cudaError_t create_stream(cudaStream_t* out, unsigned flags) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* s = new_stream(!(flags & cudaStreamNonBlocking));
    live().insert(s);
    *out = (cudaStream_t)s;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* out) {
    MAY_FAIL;
    return create_stream(out, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
    MAY_FAIL;
    return create_stream(out, flags);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int) {
    MAY_FAIL;
    return create_stream(out, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    MAY_FAIL;
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t h) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* s = h ? find_stream(h) : nullptr;
    if (!s || !s->id) {
        report("bad stream", PC, nullptr, "cudaStreamDestroy of a stream that does not exist (destroyed twice?)");
        return set_error(cudaErrorInvalidResourceHandle);
    }
    live().erase(s);                                   // its work still runs
    bury(s);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t h) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* s = find_stream(h);
    if (!s) {
        report("bad stream", PC, nullptr, "cudaStreamSynchronize of a stream that does not exist");
        return set_error(cudaErrorInvalidResourceHandle);
    }
    if (capture_forbids(s, "cudaStreamSynchronize", PC)) return cudaErrorStreamCaptureUnsupported;
    wait_for(s->last);
    return fatal_error() ? last_error : cudaSuccess;
}
// A query that finds unfinished work says so once and lets it run: programs that poll come to an end. A collective waits
// until the other ranks have come to it, however often it is asked.
static cudaError_t query(const OpRef& op) {
    if (!op) return cudaSuccess;
    if (op->done) {
        wait_for(op);
        return cudaSuccess;
    }
    force(op.get(), false);
    return cudaErrorNotReady;
}
cudaError_t cudaStreamQuery(cudaStream_t h) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* s = find_stream(h);
    return s ? query(s->last) : set_error(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaStreamGetFlags(cudaStream_t h, unsigned* flags) {
    MAY_FAIL;
    Stream* s = find_stream(h);
    *flags = s && !s->blocking ? cudaStreamNonBlocking : cudaStreamDefault;
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t h, cudaHostFn_t fn, void* data) {
    MAY_FAIL;
    return enqueue(h, "host function", PC, [fn, data] { fn(data); }) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}
cudaError_t cudaStreamAddCallback(cudaStream_t h, cudaStreamCallback_t fn, void* data, unsigned) {
    MAY_FAIL;
    return enqueue(h, "callback", PC, [h, fn, data] { fn(h, cudaSuccess, data); }) ? cudaSuccess
                                                                                   : cudaErrorInvalidResourceHandle;
}

// ---------------------------------------------------------------- events
static cudaError_t create_event(cudaEvent_t* out, unsigned flags) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto* e = new Event{nullptr, nullptr, -1, !(flags & cudaEventDisableTiming)};
    live_events().insert(e);
    *out = (cudaEvent_t)e;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) {
    MAY_FAIL;
    return create_event(out, cudaEventDefault);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    MAY_FAIL;
    return create_event(out, flags);
}
static Event* find_event(cudaEvent_t h, const char* name, void* pc) {
    if (live_events().count((Event*)h)) return (Event*)h;
    report("bad event", pc, nullptr, "%s of an event that does not exist (never created, or destroyed)", name);
    set_error(cudaErrorInvalidResourceHandle);
    return nullptr;
}
cudaError_t cudaEventDestroy(cudaEvent_t h) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Event* e = find_event(h, "cudaEventDestroy", PC);
    if (!e) return cudaErrorInvalidResourceHandle;
    live_events().erase(e);
    bury(e);
    return cudaSuccess;
}
static cudaError_t record(cudaEvent_t h, cudaStream_t stream, void* pc) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Event* e = find_event(h, "cudaEventRecord", pc);
    if (!e) return cudaErrorInvalidResourceHandle;
    Stream* s = find_stream(stream);
    OpRef op = enqueue(stream, "cudaEventRecord", pc, nullptr);
    if (!op) return cudaErrorInvalidResourceHandle;
    e->graph = s->capture;
    e->node = s->last_node;
    e->op = s->capture ? nullptr : op;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t h, cudaStream_t s) {
    MAY_FAIL;
    return record(h, s, PC);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t h, cudaStream_t s, unsigned) {
    MAY_FAIL;
    return record(h, s, PC);
}
cudaError_t cudaEventSynchronize(cudaEvent_t h) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Event* e = find_event(h, "cudaEventSynchronize", PC);
    if (!e) return cudaErrorInvalidResourceHandle;
    wait_for(e->op);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t h) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Event* e = find_event(h, "cudaEventQuery", PC);
    return e ? query(e->op) : cudaErrorInvalidResourceHandle;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Event *a = find_event(begin, "cudaEventElapsedTime", PC), *b = find_event(end, "cudaEventElapsedTime", PC);
    if (!a || !b) return cudaErrorInvalidResourceHandle;
    if (!a->op || !b->op || !a->timing || !b->timing) {
        report("event", PC, nullptr,
               "cudaEventElapsedTime of an event that was not recorded, or was created without timing");
        return set_error(cudaErrorInvalidResourceHandle);
    }
    if (!a->op->done || !b->op->done || !host_knows(b->op->id)) {
        report("missing wait", PC, nullptr, "cudaEventElapsedTime of an event that nobody has waited for");
        return set_error(cudaErrorNotReady);
    }
    *ms = (float)(1000 * (b->op->finished - a->op->finished));
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t h, cudaEvent_t event, unsigned) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Event* e = find_event(event, "cudaStreamWaitEvent", PC);
    Stream* s = find_stream(h);
    if (!e || !s) return set_error(cudaErrorInvalidResourceHandle);
    if (e->graph && capturing) {                       // joins the capture, or orders two of its streams
        if (!s->capture) {
            s->capture = e->graph;
            s->last_node = -1;
            e->graph->lanes.push_back(s);
        }
        if (e->node >= 0) s->waited_nodes.push_back(e->node);
        return cudaSuccess;
    }
    if (e->op) issue(s, "cudaStreamWaitEvent", PC, nullptr, {e->op});
    return cudaSuccess;
}

// ---------------------------------------------------------------- graphs: what streams recorded, issued as a whole
cudaError_t cudaStreamBeginCapture(cudaStream_t h, cudaStreamCaptureMode) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* s = find_stream(h);
    if (!s || !s->id || s->capture) {
        report("stream capture", PC, nullptr,
               "cudaStreamBeginCapture needs a stream of its own that is not being captured");
        return set_error(cudaErrorStreamCaptureUnsupported);
    }
    s->capture = new Graph;
    s->capture->lanes.push_back(s);
    s->last_node = -1;
    capturing++;
    return cudaSuccess;
}
static bool reaches(const Graph& g, int from, std::vector<char>& seen) {
    if (from < 0 || seen[(size_t)from]) return true;
    seen[(size_t)from] = 1;
    for (int n : g.nodes[(size_t)from].needs) reaches(g, n, seen);
    return true;
}
cudaError_t cudaStreamEndCapture(cudaStream_t h, cudaGraph_t* out) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* s = find_stream(h);
    if (!s || !s->capture || s->capture->lanes[0] != s) {
        report("stream capture", PC, nullptr, "cudaStreamEndCapture on a stream that did not begin a capture");
        return set_error(cudaErrorIllegalState);
    }
    Graph* g = s->capture;
    std::vector<char> seen(g->nodes.size());
    reaches(*g, s->last_node, seen);
    for (int n : s->waited_nodes) reaches(*g, n, seen);
    for (Stream* lane : g->lanes) {
        if (lane != s && lane->last_node >= 0 && !seen[(size_t)lane->last_node])
            report("stream capture", PC, nullptr,
                   "a stream that joined the capture never came back to the capturing stream (missing event)");
        lane->capture = nullptr;
        lane->last_node = -1;
        lane->waited_nodes.clear();
    }
    capturing--;
    *out = (cudaGraph_t)g;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t h, cudaStreamCaptureStatus* status) {
    MAY_FAIL;
    Stream* s = find_stream(h);
    *status = s && s->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
static cudaError_t instantiate(cudaGraphExec_t* out, cudaGraph_t graph) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto* g = (Graph*)graph;
    auto* e = new GraphExec{g->nodes, {nullptr}};
    while (e->hidden.size() < g->lanes.size()) e->hidden.push_back(new_stream(false));
    *out = (cudaGraphExec_t)e;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
    MAY_FAIL;
    return instantiate(out, graph);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
    MAY_FAIL;
    return instantiate(out, graph);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t h, cudaStream_t stream) {
    MAY_FAIL;
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto* e = (GraphExec*)h;
    Stream* s = find_stream(stream);
    OpRef begin = enqueue(stream, "cudaGraphLaunch", PC, nullptr);
    if (!begin || !s) return cudaErrorInvalidResourceHandle;
    std::vector<OpRef> issued;
    for (Node& n : e->nodes) {
        std::vector<OpRef> needs{begin};
        for (int k : n.needs) needs.push_back(issued[(size_t)k]);
        issued.push_back(issue(n.lane ? e->hidden[(size_t)n.lane] : s, n.name.c_str(), n.pc, n.run, needs));
    }
    issue(s, "end of a graph", PC, nullptr, issued);
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { MAY_FAIL; return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t*, size_t* n) {
    MAY_FAIL;
    *n = ((Graph*)g)->nodes.size();
    return cudaSuccess;
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t e, cudaGraph_t g, cudaGraphExecUpdateResultInfo*) {
    MAY_FAIL;
    ((GraphExec*)e)->nodes = ((Graph*)g)->nodes;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    MAY_FAIL;
    delete (Graph*)g;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
    MAY_FAIL;
    delete (GraphExec*)e;
    return cudaSuccess;
}
}
