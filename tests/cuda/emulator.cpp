// The emulator's scheduler, and kernels by name. SOURCE is the file that defines them, KERNELS one of
// lines KERNEL(instance).
#include "emulator.h"

#include <tuple>
#include <utility>

#include SOURCE

namespace emulator {

#ifdef EMULATOR_THREADS

thread_local Thread* me;

void launch(unsigned grid, unsigned threads, const std::function<void()>& kernel) {
    std::vector<Block> blocks(grid);
    std::vector<std::thread> running;
    for (Block& block : blocks) {
        block.warps = std::vector<Warp>(threads / 32);
        for (Warp& warp : block.warps) warp.barrier.expected = 32;
    }
    for (unsigned i = 0; i < grid * threads; ++i)
        running.emplace_back([&, i] {
            Block& block = blocks[i / threads];
            Thread thread{{i % threads}, {i / threads}, {threads}, {grid}, &block,
                          &block.warps[i % threads / 32], 0};
            me = &thread;
            kernel();
            thread.warp->barrier.leave();
        });
    for (std::thread& thread : running) thread.join();
}

#else

Thread* me;
int yields_without_progress;

namespace {

const size_t STACK = 256 * 1024;

struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    Thread thread;
    Fibre* next;  // of those that have not ended, in a ring
    Fibre* previous;
};

const std::function<void()>* running;
ucontext_t outside;
Fibre* current;

#ifdef __SANITIZE_ADDRESS__
const void* outside_stack;
size_t outside_size;
void before_switch(void** save, Fibre* to) {
    __sanitizer_start_switch_fiber(save, to ? to->stack.get() : outside_stack,
                                   to ? STACK : outside_size);
}
void after_switch(void* saved, bool from_outside) {
    __sanitizer_finish_switch_fiber(saved, from_outside ? &outside_stack : nullptr,
                                    from_outside ? &outside_size : nullptr);
}
#else
void before_switch(void**, Fibre*) {}
void after_switch(void*, bool) {}
#endif

bool first_switch;

void switch_to(ucontext_t* from, Fibre* to, bool ending = false) {
    void* saved = nullptr;
    current = to;
    me = to ? &to->thread : nullptr;
    before_switch(ending ? nullptr : &saved, to);
    swapcontext(from, to ? &to->context : &outside);
    after_switch(saved, false);
}

void run() {
    after_switch(nullptr, first_switch);
    first_switch = false;
    (*running)();
    Fibre* mine = current;
    mine->thread.warp->barrier.leave();
    yields_without_progress = 0;
    mine->previous->next = mine->next;
    mine->next->previous = mine->previous;
    switch_to(&mine->context, mine->next == mine ? nullptr : mine->next, true);
}

__attribute__((noinline)) void prepare(Fibre& fibre) {
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.get();
    fibre.context.uc_stack.ss_size = STACK;
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, run, 0);
}

}  // namespace

void yield() {
    if (++yields_without_progress > 4096) {
        fprintf(stderr, "emulator: deadlock, all threads of block %u wait\n", me->block.x);
        abort();
    }
    Fibre* mine = current;
    if (mine->next != mine) switch_to(&mine->context, mine->next);
}

void launch(unsigned grid, unsigned threads, const std::function<void()>& kernel) {
    static std::mutex one_at_a_time;
    static std::vector<Fibre> fibres(1024);
    std::lock_guard lock(one_at_a_time);
    running = &kernel;
    for (unsigned b = 0; b < grid; ++b) {
        Block block;
        block.warps = std::vector<Warp>(threads / 32);
        for (Warp& warp : block.warps) warp.barrier.expected = 32;
        for (unsigned i = 0; i < threads; ++i) {
            fibres[i].thread = {{i}, {b}, {threads}, {grid}, &block, &block.warps[i / 32], 0};
            fibres[i].next = &fibres[(i + 1) % threads];
            fibres[i].previous = &fibres[(i + threads - 1) % threads];
            prepare(fibres[i]);
        }
        yields_without_progress = 0;
        first_switch = true;
        switch_to(&outside, &fibres[0]);
    }
}

#endif

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
}

template <class... A>
void launch_kernel(void (*kernel)(A...), unsigned grid, unsigned threads, void** arguments) {
    launch(grid, threads, [=] { call(kernel, arguments, std::index_sequence_for<A...>()); });
}

template <class... A> std::vector<size_t> sizes_of(void (*)(A...)) { return {sizeof(A)...}; }

}  // namespace emulator

struct Instance {
    const char* name;
    std::function<void(unsigned, unsigned, void**)> launch;
    std::vector<size_t> sizes;
};

#define KERNEL(...)                                                                         \
    {#__VA_ARGS__,                                                                          \
     [](unsigned grid, unsigned threads, void** arguments) {                                \
         emulator::launch_kernel(&__VA_ARGS__, grid, threads, arguments);                   \
     },                                                                                     \
     emulator::sizes_of(&__VA_ARGS__)},
static const std::vector<Instance> instances = {
#include KERNELS
};

static const Instance* find(const char* name) {
    for (const Instance& instance : instances)
        if (!strcmp(instance.name, name)) return &instance;
    return nullptr;
}

extern "C" {

// Returns 0 when done, 1 where there is no such instance.
int emulator_launch(const char* name, unsigned grid, unsigned threads, void** arguments) {
    const Instance* instance = find(name);
    if (!instance) return 1;
    instance->launch(grid, threads, arguments);
    return 0;
}

// The size of a parameter, 0 behind the last one.
size_t emulator_parameter_nbytes(const char* name, size_t i) {
    const Instance* instance = find(name);
    return instance && i < instance->sizes.size() ? instance->sizes[i] : 0;
}
}
