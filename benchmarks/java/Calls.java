import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URLDecoder;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;

/**
 * Load through the official gRPC client for Java, for the benchmarks: the same talk as Load.java. `count` counts from the start;
 * `begin` and `end` tell the caller when to read the server's CPU time.
 */
public final class Calls {
    private static final PrintStream OUT = System.out;
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();

    private interface Work {
        void run() throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            Map<String, String> options = new HashMap<>();
            for (int i = 1; i < words.length; i++) {
                int equals = words[i].indexOf('=');
                options.put(words[i].substring(0, equals), URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
            }
            try {
                switch (words[0]) {
                    case "send": send(options); break;
                    case "receive": receive(options); break;
                    default: throw new IllegalArgumentException(words[0]);
                }
                emit("done", 0);
            } catch (Throwable error) {
                OUT.println("{\"event\": \"failed\", \"error\": \"" + String.valueOf(error).replaceAll("[\"\\\\\n\r]", " ")
                    + "\"}");
            }
            OUT.flush();
        }
        System.exit(0);
    }

    /** Sends of 128 B: each of the threads waits for its answer; with `window` one thread keeps so many under way. */
    private static void send(Map<String, String> options) throws Exception {
        byte[] body = new byte[128];
        Arrays.fill(body, (byte) 'x');
        String topic = options.get("topic");
        AtomicLong done = new AtomicLong();
        AtomicLong errors = new AtomicLong();
        Semaphore window = new Semaphore(Integer.parseInt(options.getOrDefault("window", "1")));
        try (Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration(options))
                .setTopics(topic).build()) {
            Work work = () -> producer.send(PROVIDER.newMessageBuilder().setTopic(topic).setBody(body).build());
            if (options.containsKey("window")) {
                work = () -> {
                    window.acquire();
                    producer.sendAsync(PROVIDER.newMessageBuilder().setTopic(topic).setBody(body).build())
                        .whenComplete((receipt, error) -> {
                            window.release();
                            if (error != null) errors.incrementAndGet(); else done.incrementAndGet();
                        });
                    done.decrementAndGet(); // counted when it is answered
                };
            }
            measured(options, work, done, errors, 1);
        }
    }

    /** Receives of up to 32 and an acknowledgement for each message; counted are those. */
    private static void receive(Map<String, String> options) throws Exception {
        AtomicLong done = new AtomicLong();
        AtomicLong errors = new AtomicLong();
        try (SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(configuration(options))
                .setConsumerGroup(options.get("group")).setAwaitDuration(Duration.ofSeconds(5))
                .setSubscriptionExpressions(Collections.singletonMap(options.get("topic"), FilterExpression.SUB_ALL))
                .build()) {
            measured(options, () -> {
                List<CompletableFuture<Void>> acks = new ArrayList<>();
                for (MessageView message : consumer.receive(32, Duration.ofSeconds(30))) {
                    acks.add(consumer.ackAsync(message));
                }
                for (CompletableFuture<Void> ack : acks) {
                    ack.join();
                    done.incrementAndGet();
                }
            }, done, errors, 0);
        }
    }

    /** The work in so many threads: warm seconds, then the measured ones. `each`: what one run of it counts. */
    private static void measured(Map<String, String> options, Work work, AtomicLong done, AtomicLong errors, long each)
            throws Exception {
        Thread[] threads = new Thread[Integer.parseInt(options.get("threads"))];
        boolean[] stop = {false};
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(() -> {
                while (!stop[0]) {
                    try {
                        work.run();
                        done.addAndGet(each);
                    } catch (Exception error) {
                        if (errors.incrementAndGet() == 1) error.printStackTrace();
                    }
                }
            });
            threads[i].start();
        }
        Thread.sleep(Math.round(Double.parseDouble(options.get("warm_s")) * 1000));
        emit("begin", done.get());
        Thread.sleep(Math.round(Double.parseDouble(options.get("measure_s")) * 1000));
        emit("end", done.get());
        stop[0] = true;
        for (Thread thread : threads) thread.join(10_000);
        emit("errors", errors.get());
    }

    private static ClientConfiguration configuration(Map<String, String> options) {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder().setEndpoints(options.get("ep"))
            .setRequestTimeout(Duration.ofSeconds(20));
        return builder.enableSsl("1".equals(options.get("ssl"))).build();
    }

    private static void emit(String event, long count) {
        synchronized (OUT) {
            OUT.println("{\"event\": \"" + event + "\", \"count\": " + count + "}");
            OUT.flush();
        }
    }
}
