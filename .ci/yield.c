/* Loaded into a program with LD_PRELOAD, it makes each of its threads let others run after every 50 us of computing.
 *
 * Kernels of GPUs that are compiled for the processor have a thread for each of their units, eight for a matrix product, which
 * wait for each other in loops. On a machine with fewer cores, whoever waits keeps a core from the one it waits for until the
 * system takes it away, 4 ms later; a product of a few numbers waits a thousand times. That is seconds instead of milliseconds.
 * The time must be longer than what the interruption itself takes, or nothing else is done: some virtual machines are that slow at
 * 14 us, and between 50 us and 100 us makes little difference.
 *
 * A timer of the thread's own time (see perf_event_open(2)) is passed on to all threads that it starts. Where the system
 * refuses it, the program runs on without, and says so.
 */
#define _GNU_SOURCE
#include <linux/perf_event.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

static void let_others_run(int signal) {
    (void)signal;
    sched_yield();
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {.sa_handler = let_others_run, .sa_flags = SA_RESTART};
    struct perf_event_attr timer = {
        .type = PERF_TYPE_SOFTWARE,
        .size = sizeof(timer),
        .config = PERF_COUNT_SW_TASK_CLOCK,
        .sample_period = 50000,
        .inherit = 1,
        .inherit_thread = 1,
        .exclude_kernel = 1,
        .sigtrap = 1,
        .remove_on_exec = 1,
    };
    if (sigaction(SIGTRAP, &action, NULL) != 0 || syscall(SYS_perf_event_open, &timer, 0, -1, -1, PERF_FLAG_FD_CLOEXEC) < 0) {
        perror("yield: threads that wait for each other keep their cores");
    }
}
