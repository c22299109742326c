/* Prints how many thousand times a second this host's time stamp counter counts: a guest must not have to guess. */
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC_RAW, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int main(void) {
    double start = now();
    unsigned long long ticks = __rdtsc();
    struct timespec pause = {0, 100000000};
    nanosleep(&pause, NULL);
    ticks = __rdtsc() - ticks;
    printf("%.0f\n", ticks / (now() - start) / 1e3);
}
