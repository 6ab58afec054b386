import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Members of one group with different subscriptions, each a push consumer of the unmodified Java client.
 *
 * <p>A line on stdin is {@code story key=value ...} (values URL-encoded): {@code members} are expressions separated by
 * newlines (tags, or SQL92 after {@code sql:}), {@code tags} are sent in turn, {@code count} messages of each. The answer
 * is JSON lines: a {@code got} for each delivery, {@code refused} for a member that does not start, then {@code done}.
 */
public final class Contract {
    private static final PrintStream OUT = System.out;

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Map<String, String> options = new HashMap<>();
            String[] words = line.trim().split(" ");
            for (int i = 1; i < words.length; i++) {
                int equals = words[i].indexOf('=');
                options.put(words[i].substring(0, equals), URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
            }
            try {
                story(options);
                emit("{\"event\": \"done\"}");
            } catch (Throwable error) {
                emit("{\"event\": \"failed\", \"error\": \"" + plain(String.valueOf(error)) + "\"}");
            }
        }
        System.exit(0);
    }

    private static void story(Map<String, String> options) throws Exception {
        String[] members = options.get("members").split("\n");
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        DefaultMQProducer producer = new DefaultMQProducer("contract-producer");
        producer.setNamesrvAddr(options.get("ns"));
        producer.setInstanceName("p" + System.nanoTime());
        producer.start();
        try {
            for (int i = 0; i < members.length; i++) {
                try {
                    consumers.add(started(options, members[i], i));
                } catch (Exception error) {
                    emit("{\"event\": \"refused\", \"member\": " + i + ", \"error\": \"" + plain(String.valueOf(error))
                        + "\"}");
                }
                Thread.sleep(1500); // the one has its queues before the next comes
            }
            Thread.sleep(Long.parseLong(options.getOrDefault("settle_ms", "2500")));
            String[] tags = options.get("tags").split(",");
            int count = Integer.parseInt(options.get("count"));
            for (int i = 0; i < count * tags.length; i++) {
                String tag = tags[i % tags.length];
                Message message = new Message(options.get("topic"), tag, (tag + "-" + i).getBytes(StandardCharsets.UTF_8));
                message.putUserProperty("n", String.valueOf(i));
                producer.send(message);
            }
            Thread.sleep(Long.parseLong(options.getOrDefault("wait_ms", "6000")));
        } finally {
            producer.shutdown();
            for (int i = consumers.size() - 1; i >= 0; i--) { // a refused one is taken when the others have left
                consumers.get(i).shutdown();
            }
        }
    }

    private static DefaultMQPushConsumer started(Map<String, String> options, String wanted, int member) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(options.get("group"));
        consumer.setNamesrvAddr(options.get("ns"));
        consumer.setInstanceName("c" + System.nanoTime());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setHeartbeatBrokerInterval(2_000);
        consumer.setPollNameServerInterval(2_000);
        if (wanted.startsWith("sql:")) {
            consumer.subscribe(options.get("topic"), MessageSelector.bySql(wanted.substring(4)));
        } else {
            consumer.subscribe(options.get("topic"), wanted);
        }
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                emit("{\"event\": \"got\", \"member\": " + member + ", \"body\": \""
                    + new String(message.getBody(), StandardCharsets.UTF_8) + "\"}");
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }

    private static String plain(String text) {
        return text.replace("\\", " ").replace("\"", "'").replaceAll("[^ -~]", " ");
    }

    private static void emit(String line) {
        synchronized (OUT) {
            OUT.println(line);
            OUT.flush();
        }
    }
}
